"""Requests to forward passes: buffers, batches, metadata, captured graphs, and the engine around them."""

from piecewise_backend.runner.batch import InputBatch, ScheduledRequest
from piecewise_backend.runner.config import RunnerConfig
from piecewise_backend.runner.data_parallel import DataParallel
from piecewise_backend.runner.draft import DraftModel
from piecewise_backend.runner.engine import Engine, NewToken
from piecewise_backend.runner.llm import LLM, Chunk, Completion
from piecewise_backend.runner.model_runner import ModelRunner
from piecewise_backend.runner.request import Request, SamplingParams
from piecewise_backend.runner.speculation import PromptLookup, Speculator

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "DataParallel",
    "DraftModel",
    "Engine",
    "InputBatch",
    "ModelRunner",
    "NewToken",
    "PromptLookup",
    "Request",
    "RunnerConfig",
    "SamplingParams",
    "ScheduledRequest",
    "Speculator",
]
