"""The cores of all executors: which one gets the group that stands first."""
