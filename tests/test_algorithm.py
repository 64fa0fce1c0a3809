"""The capability table: exhaustive over algorithms and features, so that a new member cannot be forgotten."""

import dataclasses
import itertools

import pytest

from ddtree_jax import InvariantError, SpeculativeAlgorithm, UnsupportedRequestError
from ddtree_jax.algorithm import (
    ALLOW_HYBRID_UNSAFE,
    CAPABILITIES,
    FEATURES,
    Capabilities,
    capabilities,
    require,
    require_drafter,
    require_grammar_rows,
    require_recurrent,
    spoils_recurrent_state,
)

MEMBERS = tuple(SpeculativeAlgorithm)
COLUMNS = tuple(field.name for field in dataclasses.fields(Capabilities))


def test_every_member_has_a_row_and_every_column_but_the_need_is_a_feature():
    assert set(CAPABILITIES) == set(MEMBERS)
    assert set(FEATURES) == set(COLUMNS) - {"needs_drafter"}
    for row in CAPABILITIES.values():
        assert all(isinstance(value, bool) for value in dataclasses.astuple(row))


def test_the_table_of_this_version():
    assert {member.name: dataclasses.astuple(row) for member, row in CAPABILITIES.items()} == {
        # needs_drafter, grammar, sampling, ragged_batch, branching, recurrent_target
        "NONE": (False, True, True, True, False, True),
        "DFLASH": (True, True, True, True, False, True),
        "DDTREE": (True, True, True, True, True, False),
    }


@pytest.mark.parametrize("member", MEMBERS)
def test_parse_takes_the_member_and_its_name_in_any_case(member):
    assert SpeculativeAlgorithm.parse(member) is member
    for name in (member.name, member.name.lower(), member.name.capitalize(), member.value):
        assert SpeculativeAlgorithm.parse(name) is member
        assert capabilities(name) is CAPABILITIES[member]


@pytest.mark.parametrize("value", ["", "tree", "ddtree ", "dd tree", None, 0, True, b"none", ["none"]])
def test_parse_names_what_was_got_and_what_is_allowed(value):
    with pytest.raises(ValueError, match="algorithm") as caught:
        SpeculativeAlgorithm.parse(value)
    assert repr(value) in str(caught.value)
    for member in MEMBERS:
        assert member.value in str(caught.value)


@pytest.mark.parametrize(("member", "feature"), tuple(itertools.product(MEMBERS, FEATURES)))
def test_regression_g77_every_member_and_feature_follows_the_table(member, feature):
    if getattr(CAPABILITIES[member], feature):
        require(member, feature)
        require(member.value, feature)
        return
    with pytest.raises(UnsupportedRequestError) as caught:
        require(member, feature)
    assert member.name in str(caught.value) and feature in str(caught.value)
    able = [other for other in MEMBERS if getattr(CAPABILITIES[other], feature)]
    for other in able:
        assert other.value in str(caught.value).split(";")[1]
    assert able or "no algorithm" in str(caught.value)


def test_require_checks_every_feature_given_and_admits_a_request_that_needs_none():
    require("ddtree")
    require("ddtree", "sampling", "branching")
    with pytest.raises(UnsupportedRequestError, match="branching"):
        require("dflash", "sampling", "branching")
    with pytest.raises(ValueError, match="needs_drafter"):
        require("ddtree", "needs_drafter")


@pytest.mark.parametrize("member", MEMBERS)
def test_only_algorithms_that_draft_need_a_drafter(member):
    require_drafter(member, True)
    if not CAPABILITIES[member].needs_drafter:
        require_drafter(member, False)
        return
    with pytest.raises(UnsupportedRequestError, match=f"{member.name}.*drafter.*none"):
        require_drafter(member, False)


@pytest.mark.parametrize("member", [*MEMBERS, None])
def test_only_a_constrained_batch_without_rows_breaks_the_invariant(member):
    for constrained, has_rows in ((False, False), (False, True), (True, True)):
        require_grammar_rows(member, constrained=constrained, has_rows=has_rows)
    with pytest.raises(InvariantError, match="unnamed" if member is None else f"^{member.name} "):
        require_grammar_rows(member, constrained=True, has_rows=False)


BUDGETS = (0, 1, 2, 4, 1024)


@pytest.mark.parametrize(("member", "budget"), tuple(itertools.product(MEMBERS, BUDGETS)))
def test_the_hybrid_gate_follows_the_table(member, budget):
    """What the row does not promise is refused, but for a tree that has no room for a sibling."""
    row = CAPABILITIES[member]
    spoils = not row.recurrent_target and not (row.branching and budget < 2)
    for algorithm in (member, member.value):
        assert spoils_recurrent_state(algorithm, budget) is spoils
    for allow in (False, True):
        assert require_recurrent(member, budget, (), allow_unsafe=allow, name="x") is False
    assert require_recurrent(member, budget, (1, 3), allow_unsafe=True, name="x") is spoils
    if not spoils:
        assert require_recurrent(member, budget, (1, 3), allow_unsafe=False, name="x") is False
        return
    with pytest.raises(UnsupportedRequestError) as caught:
        require_recurrent(member, budget, (1, 3), allow_unsafe=False, name="own-name")
    named = (member.name, f"budget {budget}", "recurrent_target", "layers 1, 3 of own-name", "allow_hybrid_unsafe=True")
    for text in (
        *named,
        ALLOW_HYBRID_UNSAFE,
        *(other.value for other in MEMBERS if CAPABILITIES[other].recurrent_target),
    ):
        assert text in str(caught.value)


def test_the_hybrid_gate_separates_the_members_of_this_version():
    refused = {member.name for member in MEMBERS if spoils_recurrent_state(member, 2)}
    assert refused == {"DDTREE"}
    assert not any(spoils_recurrent_state(member, 1) for member in MEMBERS)


@pytest.mark.parametrize("branching", [False, True])
def test_a_chain_is_exempt_by_its_budget_only_where_the_budget_is_read(monkeypatch, branching):
    """A chain algorithm whose commit did not take the last accepted state would be refused at any budget."""
    member = MEMBERS[-1]
    row = dataclasses.replace(CAPABILITIES[member], branching=branching, recurrent_target=False)
    monkeypatch.setitem(CAPABILITIES, member, row)
    assert spoils_recurrent_state(member, 1) is not branching
    assert spoils_recurrent_state(member, 2)
