"""Whether `portfolio` finds the best of its candidates, and what that costs."""
