"""Repository ids: when a name is one, what is fetched, what is never loaded, and what each failure tells to do."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, hub
from ddtree_jax.models import load_drafter, load_target, make_drafter, make_target, save_drafter, save_target
from tests.conftest import compilation_as_here
from tests.engine.conftest import DRAFTER, TARGET

ROOT = Path(__file__).parents[1]
NAME = "some-org/some.Model_1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = make_target(TARGET, dtype="float32")
    save_target(target, root / "target", dtype="float32")
    save_drafter(make_drafter(DRAFTER, target), target, root / "drafter", dtype="float32")
    return root


class Errors:
    """The part of `huggingface_hub.errors` that is told apart, with its inheritance."""

    RepositoryNotFoundError = type("RepositoryNotFoundError", (OSError,), {})
    GatedRepoError = type("GatedRepoError", (RepositoryNotFoundError,), {})
    OfflineModeIsEnabled = type("OfflineModeIsEnabled", (ConnectionError,), {})
    LocalEntryNotFoundError = type("LocalEntryNotFoundError", (FileNotFoundError,), {})


class FakeHub(types.ModuleType):
    """Repositories by name: `cached` is what the cache holds, `online` what a download gives; an error is raised."""

    def __init__(self):
        super().__init__("huggingface_hub")
        self.errors, self.calls, self.cached, self.online = Errors, [], {}, {}

    def snapshot_download(self, *, repo_id, allow_patterns, ignore_patterns, local_files_only=False):
        self.calls.append((repo_id, local_files_only))
        assert "*.safetensors" in allow_patterns and "*.json" in allow_patterns and ignore_patterns == ["*/*"]
        found = (self.cached if local_files_only else self.online).get(repo_id)
        found = Errors.LocalEntryNotFoundError("cannot find it") if found is None else found
        if isinstance(found, Exception):
            raise found
        return str(found)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    module = FakeHub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.chdir(tmp_path)
    return module


REPOSITORY_IDS = ["a/b", "zai-org/GLM-5", "a1/b_c.d-e", NAME, Path("org/name"), "a/" + "b" * 90]
PATHS = [
    *("name", "./a", "../a", "./a/b", "/a/b", "/tmp", "a/b/c", "a//b", "a/", "/a", "", ".", "..", "~/a", "a\\b"),
    *(".a/b", "a/.b", "-a/b", "a/-b", "a/b-", "a/b.", "a b/c", "a/b c", "a/b\n", "a/ü", "a--b/c", "a/b..c", "a\0/b"),
    *("a/" + "b" * 95, "C:/x", "hf://a/b", "https://x/y"),
]


@pytest.mark.parametrize("name", REPOSITORY_IDS)
def test_what_may_be_a_repository(name, fake):
    assert hub.is_repository_id(name)


@pytest.mark.parametrize("name", PATHS)
def test_what_is_a_path(name, fake):
    assert not hub.is_repository_id(name)
    assert hub.resolve(name) == Path(name) and not fake.calls


def test_an_existing_folder_wins(fake, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert hub.resolve("a/b") == Path("a/b") and hub.resolve(Path("a/b")) == Path("a/b")
    assert hub.resolve("a/slip") == Path("a/slip"), "beside an existing folder it is a misspelt path"
    assert not fake.calls


def test_the_cache_is_enough(fake, folders):
    fake.cached[NAME] = folders / "target"
    assert hub.resolve(NAME) == folders / "target"
    assert fake.calls == [(NAME, True)]


def test_what_is_not_cached_is_downloaded(fake, folders):
    fake.online[NAME] = folders / "target"
    assert hub.resolve(NAME) == folders / "target"
    assert fake.calls == [(NAME, True), (NAME, False)]


def test_every_loader_takes_a_repository(fake, folders):
    fake.cached |= {"org/target": folders / "target", "org/drafter": folders / "drafter"}
    engine = ddtree_jax.load("org/target", "org/drafter")
    assert engine.target.config == TARGET and engine.drafter.config == DRAFTER and engine.name == "org/target"
    target = load_target("org/target")
    assert target.folder == folders / "target"
    assert load_drafter("org/drafter", target).config == DRAFTER


def sharded(folder, missing):
    """A folder whose index names two shards; the files of `missing` are not there, or are links to nothing."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        (folder / name).write_text("")
    for name, link in missing.items():
        (folder / name).unlink()
        if link:
            (folder / name).symlink_to("../blobs/gone")
    return folder


SECOND = "model-00002-of-00002.safetensors"
PARTS = [{SECOND: False}, {SECOND: True}, {"config.json": False}, {"model.safetensors.index.json": True}]


@pytest.mark.parametrize("missing", PARTS)
def test_a_part_of_a_model_in_the_cache_is_completed(fake, folders, tmp_path, missing):
    fake.cached[NAME] = sharded(tmp_path / "part", missing)
    assert hub.missing_file(tmp_path / "part") in missing
    fake.online[NAME] = folders / "target"
    assert hub.resolve(NAME) == folders / "target"
    assert fake.calls == [(NAME, True), (NAME, False)]


@pytest.mark.parametrize("missing", PARTS)
def test_a_part_of_a_model_is_never_taken_for_the_whole(fake, tmp_path, missing):
    fake.cached[NAME] = sharded(tmp_path / "part", missing)
    with pytest.raises(CheckpointError, match="not whole in the cache.*offline"):
        load_target(NAME)
    fake.online[NAME] = fake.cached[NAME]
    with pytest.raises(CheckpointError, match=f"has no {next(iter(missing))}"):
        load_target(NAME)


def test_whole_folders_are_whole(folders, tmp_path):
    assert hub.missing_file(folders / "target") is None
    assert hub.missing_file(sharded(tmp_path / "shards", {})) is None
    (tmp_path / "empty").mkdir()
    assert hub.missing_file(tmp_path / "empty") == "config.json"
    for damaged in ("{", "[]", '{"weight_map": 3}', "{}"):
        (tmp_path / "shards" / "model.safetensors.index.json").write_text(damaged)
        assert hub.missing_file(tmp_path / "shards") == "model.safetensors.index.json"


FAILURES = {
    "gated": (Errors.GatedRepoError("403\n\nAccess to model is restricted"), ["restricted", "hf auth login"]),
    "unknown": (Errors.RepositoryNotFoundError("401 Client Error."), ["no such repository", "check its name"]),
    "offline mode": (Errors.OfflineModeIsEnabled("HF_HUB_OFFLINE"), ["HF_HUB_OFFLINE", "go online"]),
    "not cached": (Errors.LocalEntryNotFoundError("no"), ["cannot be reached", "go online"]),
    "anything else": (RuntimeError("the disk\nis full" + "x" * 500), ["the disk is full", "try again"]),
    "without a word": (ValueError(), ["ValueError"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_says_what_to_do_in_one_line(fake, name):
    error, parts = FAILURES[name]
    fake.online[NAME] = error
    with pytest.raises(CheckpointError) as raised:
        load_target(NAME)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 600
    for part in (*parts, NAME, "no such folder", f"hf download {NAME}"):
        assert part in message, part


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # the import fails
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such folder.*pip install 'ddtree-jax\[hub\]'.*hf download"):
        ddtree_jax.load(NAME)
    with pytest.raises(CheckpointError, match="no such folder; expected"):
        ddtree_jax.load("./some/where")


def test_the_package_is_imported_only_for_a_repository_id():
    code = "import sys, ddtree_jax.engine, ddtree_jax.cli; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(cache, repository, folder, left_out=()):
    """The hub's own layout: blobs, a snapshot of links to them, and the reference of the main branch."""
    root = cache / ("models--" + repository.replace("/", "--"))
    snapshot = root / "snapshots" / COMMIT
    for part in (root / "refs", root / "blobs", snapshot):
        part.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for i, file in enumerate(sorted(folder.iterdir())):
        if file.name not in left_out:
            shutil.copy(file, root / "blobs" / f"{i:040x}")
            (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    return snapshot


@pytest.mark.parametrize("left_out", [(), ("model.safetensors",)], ids=["whole", "part"])
def test_the_real_package_reads_its_cache_offline(folders, tmp_path, left_out):
    """In a process of its own: the package reads its settings when it is imported."""
    pytest.importorskip("huggingface_hub")
    fill_cache(tmp_path / "cache", "org/target", folders / "target", left_out)
    fill_cache(tmp_path / "cache", "org/drafter", folders / "drafter")
    command = ["-m", "ddtree_jax", "generate", "--target", "org/target", "--drafter", "org/drafter"]
    command += ["--token-ids", "1,2,3", "--max-new-tokens", "4", "--json", "--stop-token-ids", ""]
    # An address that nothing answers, should the package go online all the same.
    settings = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    settings |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **compilation_as_here()}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **settings},
        check=False,
    )
    if not left_out:
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["token_ids"]) == 4
    else:
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        for part in ("org/target", "model.safetensors", "go online"):
            assert part in done.stderr, done.stderr


def test_the_real_package_has_the_errors_that_are_told_apart():
    errors = pytest.importorskip("huggingface_hub.errors")
    assert issubclass(errors.GatedRepoError, errors.RepositoryNotFoundError)
    for name in ("OfflineModeIsEnabled", "LocalEntryNotFoundError"):
        assert issubclass(getattr(errors, name), Exception)


def test_the_command_line_prints_one_line(fake, capsys):
    from ddtree_jax import cli

    fake.online[NAME] = Errors.GatedRepoError("403\nforbidden")
    assert cli.main(["generate", "x", "--target", NAME]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "hf auth login" in captured.err
