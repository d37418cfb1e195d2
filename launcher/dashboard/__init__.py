"""`spo dashboard`: runs on one page, live and afterwards."""
