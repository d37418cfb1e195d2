"""The process that runs programs one after another. Only the standard library: it starts in milliseconds."""
