"""The process that runs programs in turn. It imports only the standard library, so it starts in milliseconds."""
