"""From what clients ask for, a schema, a regular expression, tools, to the grammar that executors follow."""
