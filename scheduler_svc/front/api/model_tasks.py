"""The tasks of a model, and the refusal of every other task."""

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import PoolingTask
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.text_model import TextModel

# The calls for each task, over gRPC and over HTTP.
_CALLS = {
    pb.MODEL_TASK_GENERATE: "Generate (/v1/chat/completions, /v1/completions)",
    pb.MODEL_TASK_EMBED: "Embed (/v1/embeddings)",
    pb.MODEL_TASK_SCORE: "Score (/v1/score, /v1/rerank)",
}
TASK_NAMES = {pb.MODEL_TASK_GENERATE: "generate", pb.MODEL_TASK_EMBED: "embed", pb.MODEL_TASK_SCORE: "score"}
_OF_POOLING = {PoolingTask.EMBED: pb.MODEL_TASK_EMBED, PoolingTask.SCORE: pb.MODEL_TASK_SCORE}


class WrongTaskError(InvalidFieldError):
    """A model is asked for a task that it does not do."""

    def __init__(self, task: "pb.ModelTask.ValueType", model: TextModel) -> None:
        can = " and ".join(_CALLS[each] for each in tasks_of(model.info))
        rule = f"one that can {TASK_NAMES[task]}; this one answers {can}{_remedy(task, model)}"
        super().__init__("model", shown_json(model.name), rule)


def tasks_of(info: ExecutorInfo) -> "list[pb.ModelTask.ValueType]":
    """Return the tasks of an executor's model."""
    generates = [pb.MODEL_TASK_GENERATE] if info.is_generative else []
    return [*generates, *(_OF_POOLING[task] for task in PoolingTask if task in info.pooling_tasks)]


def check_generates(model: TextModel) -> None:
    """Raise WrongTaskError unless the model generates."""
    if not model.info.is_generative:
        raise WrongTaskError(pb.MODEL_TASK_GENERATE, model)


def check_task(task: PoolingTask, model: TextModel) -> None:
    """Raise WrongTaskError unless the model does the task."""
    if task not in model.info.pooling_tasks:
        raise WrongTaskError(_OF_POOLING[task], model)


def _remedy(task: "pb.ModelTask.ValueType", model: TextModel) -> str:
    """Return how to make a model that only generates embed, as the end of a sentence."""
    if task != pb.MODEL_TASK_EMBED or model.info.pooling_tasks or model.info.has_encoder:
        return ""
    return ". Its directory has no pooling configuration: start the executor with --pooling last, or mean"
