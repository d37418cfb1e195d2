"""`spo run`: starts, supervises and displays a whole run on this machine."""
