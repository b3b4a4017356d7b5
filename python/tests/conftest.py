"""A judgement that failed keeps its folder for `explain`: those of the tests go with the run."""

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # pytest's own stays where it is: sockets need short paths
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        was = dict(os.environ)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if "TMPDIR" in was:
            os.environ["TMPDIR"] = was["TMPDIR"]
