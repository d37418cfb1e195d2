"""`spo doctor`, `spo run --dry-run` and `spo data check`: they find what would keep a run from starting."""
