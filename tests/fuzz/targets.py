"""All targets."""

from tests.fuzz.answers import EngineAnswers, ExecutorAnswers, SchedulerAnswers
from tests.fuzz.calls import ClientCalls, FrontMessages, SchedulerMessages
from tests.fuzz.files import HttpBodies, ModelDirectories, Tokenizers
from tests.fuzz.gguf_files import GGUFFiles
from tests.fuzz.grammars import Grammars
from tests.fuzz.step_logs import StepLogs
from tests.fuzz.target import Target

TARGETS: tuple[type[Target], ...] = (
    ClientCalls,
    SchedulerAnswers,
    FrontMessages,
    EngineAnswers,
    SchedulerMessages,
    ExecutorAnswers,
    HttpBodies,
    Tokenizers,
    ModelDirectories,
    GGUFFiles,
    Grammars,
    StepLogs,
)
