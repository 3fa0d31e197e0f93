"""The documentation: its pages, Sphinx's configuration, and in `docs.tools` what writes the reference pages."""
