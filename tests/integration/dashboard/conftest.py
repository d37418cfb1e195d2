"""Pages in a browser: of a run that a server shows, and of one that was saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from launcher.dashboard import watch
from tests.support.dashboard import Open, served
from tests.support.run_folder import full_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL", 0.1)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens pages; afterwards no page has asked for anything elsewhere, and none had an error or a complaint."""
    contexts = []
    own, asked, errors = ["data:"], list[str](), list[str]()

    def open_page(address: str, view: str = "charts", width: int = 1200, script: str = "", **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(180_000)
        page.add_init_script(script)
        own.append(address)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
        page.goto(f"{address}#/{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(tuple(own))] == []
    assert errors == []


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with served(full_run(tmp_path_factory.mktemp("runs") / "mine"), "Report of mine") as pages:
        yield pages


@pytest.fixture(params=["live", "saved"])
def address(request: pytest.FixtureRequest, pages: dict[str, str]) -> str:
    return pages[request.param]


@pytest.fixture
def page(opened: Open, address: str) -> Page:
    return opened(address, color_scheme="light")
