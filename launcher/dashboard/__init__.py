"""`spo dashboard`: serves the page that shows runs."""
