"""Access to the page: with the token, or only from this machine. The page may load nothing from other servers."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.network import header_host, is_loopback
from launcher.page.html import content_policy

HEADERS = {
    "Content-Security-Policy": content_policy("'self'") + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware that checks every request.

    Another site can point a host name of its own at this machine and so make a browser send requests here (DNS
    rebinding). Without a token, requests for unknown host names are therefore refused; such a site has no token.

    Args:
        hosts: host names, besides this machine's loopback, that requests may ask for.
        token: must come as `?token=`, as a cookie or as `Authorization: Bearer`; None if none is needed. A browser
            also sends the cookie when another page links here, which is harmless: this server changes nothing.
        cookie: name of the cookie; one for each port, since a browser sends cookies to all ports of a machine.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str | None, cookie: str) -> None:
        self._app, self._hosts, self._token, self._cookie = app, {*hosts}, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            scope.get("state", {}).get("admit", lambda: None)()
        answer = refusal or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            is_known = self._is_known(request.headers.get("host", ""))
            return None if is_known else PlainTextResponse("unknown host name", 403)
        if any(map(self._matches, request.query_params.getlist("token"))):
            response = RedirectResponse(quote(scope["path"]), 303)
            response.set_cookie(self._cookie, quote(self._token, safe=""), httponly=True, samesite="lax", path="/")
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._matches(bearer):
            return None
        if self._matches(request.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse("a token is needed: use the address that `spo dashboard` printed", 401)

    def _matches(self, shown: str) -> bool:
        assert self._token is not None
        own = shown.encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(own, one.encode()) for one in (self._token, quote(self._token, safe="")))

    def _is_known(self, host: str) -> bool:
        name = header_host(host)
        return is_loopback(name) or name in self._hosts
