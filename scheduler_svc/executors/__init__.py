"""The executors as the scheduler sees them: who there ought to be, who is attached, the steps that drive each one."""
