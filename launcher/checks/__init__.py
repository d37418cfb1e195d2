"""`spo doctor` and `spo run --dry-run`: what would keep a run from starting, said before it is started."""
