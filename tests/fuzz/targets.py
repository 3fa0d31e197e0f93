"""All targets."""

from tests.fuzz.calls import ClientCalls, FrontMessages, SchedulerMessages
from tests.fuzz.step_logs import StepLogs
from tests.fuzz.target import Target

TARGETS: tuple[type[Target], ...] = (ClientCalls, FrontMessages, SchedulerMessages, StepLogs)
