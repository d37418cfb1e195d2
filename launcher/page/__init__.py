"""The page that shows runs, live or saved: its panels as plain data, and the HTML that draws them."""
