"""Why a TLS connection was not made, where another attempt would fail in the same way."""

from __future__ import annotations

import ssl

CA = "name the certificate that signed it, with ?ssl_ca_certs=FILE behind the address"


def refusal(error: BaseException) -> str | None:
    """What is wrong with the certificates; None for an error of another kind."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the server's certificate is refused ({cause.verify_message}); {CA}"
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
            return f"the server refuses our side of TLS ({cause.reason}); it may want ssl_certfile and ssl_keyfile"
        cause = cause.__cause__ or cause.__context__
    return None
