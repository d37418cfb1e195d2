"""An episode: its turns, what they need, and what is sent of it."""
