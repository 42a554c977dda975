"""Where weights may be: one constraint a module."""
