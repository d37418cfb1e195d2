"""`spo report` and `spo compare`: what a run has learned, with bands, as one HTML file or a table."""
