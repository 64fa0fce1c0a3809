"""Puts this folder on the import path, for the helper modules beside the tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
