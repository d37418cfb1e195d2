"""`spo dashboard`: the page of runs, live and afterwards."""
