"""What the tests of whole runs in containers share: images built once, and one project with its volumes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.compose import Containers


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Images built from this checkout; all else is gone afterwards."""
    folder = tmp_path_factory.mktemp("compose")
    made = Containers(folder / "secrets", folder / "run.env")
    try:
        made.build()
        yield made
    finally:
        made.down()


@pytest.fixture(autouse=True)
def logs_of_a_failure(containers: Containers, request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(containers.logs())
