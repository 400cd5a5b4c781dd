"""holmes.workable_plan: the sizes asked for where they fit, else the nearest, with the reason."""
