"""`spo compare`: runs side by side, as a table and as the saved page of all of them."""
