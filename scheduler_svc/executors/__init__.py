"""The executors as the scheduler sees them: expected ones, attached ones, and the steps that drive each."""
