"""Every kind of checkpoint that is met in the field, as a table of builders and what becomes of each."""
