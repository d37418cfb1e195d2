"""Where the client's token comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import SandboxConfig
from common.errors import UserError
from sandbox_client.factory import TOKEN_VARIABLE, make_sandbox

URL = "http://127.0.0.1:1"


def sent(config: SandboxConfig) -> str | None:
    """The header that carries the token."""
    return make_sandbox(config)._http.headers.get("authorization")  # type: ignore[attr-defined]


def test_a_file_goes_before_the_configuration_and_that_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("of the file\n")
    assert sent(SandboxConfig(url=URL)) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment")
    assert sent(SandboxConfig(url=URL)) == "Bearer of the environment"
    assert sent(SandboxConfig(url=URL, token="of the configuration")) == "Bearer of the configuration"
    assert sent(SandboxConfig(url=URL, token="of the configuration", token_file=str(file))) == "Bearer of the file"


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read sandbox.token_file .*none: No such file"):
        make_sandbox(SandboxConfig(url=URL, token_file=str(tmp_path / "none")))
