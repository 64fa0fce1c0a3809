"""The stages of `examples/train_demo.py`: corpus, target, indexer, own text, drafter, evaluation, export."""
