"""Programs as answers: run in the sandbox and scored by the tests they pass."""
