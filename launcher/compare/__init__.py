"""`spo compare`: several runs side by side, those that differ only in their seed as one."""
