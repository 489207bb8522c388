from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_STARTING: _ClassVar[RunState]
    RUN_STATE_COMPILING: _ClassVar[RunState]
    RUN_STATE_TRAINING: _ClassVar[RunState]
    RUN_STATE_WAITING_FOR_DATA: _ClassVar[RunState]
    RUN_STATE_PAUSING: _ClassVar[RunState]
    RUN_STATE_PAUSED: _ClassVar[RunState]
    RUN_STATE_FINISHING: _ClassVar[RunState]
    RUN_STATE_STOPPING: _ClassVar[RunState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_STARTING: RunState
RUN_STATE_COMPILING: RunState
RUN_STATE_TRAINING: RunState
RUN_STATE_WAITING_FOR_DATA: RunState
RUN_STATE_PAUSING: RunState
RUN_STATE_PAUSED: RunState
RUN_STATE_FINISHING: RunState
RUN_STATE_STOPPING: RunState

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: RunStatus
    def __init__(self, status: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: RunStatus
    def __init__(self, status: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: RunStatus
    def __init__(self, status: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: RunStatus
    def __init__(self, status: _Optional[_Union[RunStatus, _Mapping]] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "state", "doing", "progress_age_seconds", "progress_allowance_seconds", "trainer", "incarnation", "epoch", "step", "num_steps", "micro_step", "train_step", "phase", "staged", "staging_latched", "refusals", "notes", "last_note", "queue", "steps", "stop_reason", "uptime_seconds", "pid")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NotesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_ALLOWANCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    STAGING_LATCHED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    LAST_NOTE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: RunState
    doing: str
    progress_age_seconds: float
    progress_allowance_seconds: float
    trainer: str
    incarnation: str
    epoch: int
    step: int
    num_steps: int
    micro_step: int
    train_step: int
    phase: str
    staged: str
    staging_latched: bool
    refusals: _containers.ScalarMap[str, int]
    notes: _containers.ScalarMap[str, int]
    last_note: str
    queue: QueueStatus
    steps: _containers.RepeatedCompositeFieldContainer[StepStatus]
    stop_reason: str
    uptime_seconds: float
    pid: int
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., doing: _Optional[str] = ..., progress_age_seconds: _Optional[float] = ..., progress_allowance_seconds: _Optional[float] = ..., trainer: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., num_steps: _Optional[int] = ..., micro_step: _Optional[int] = ..., train_step: _Optional[int] = ..., phase: _Optional[str] = ..., staged: _Optional[str] = ..., staging_latched: bool = ..., refusals: _Optional[_Mapping[str, int]] = ..., notes: _Optional[_Mapping[str, int]] = ..., last_note: _Optional[str] = ..., queue: _Optional[_Union[QueueStatus, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepStatus, _Mapping]]] = ..., stop_reason: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., pid: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("ready_micro_batches", "put_bytes", "put_retries", "live")
    READY_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUT_RETRIES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    ready_micro_batches: int
    put_bytes: int
    put_retries: int
    live: LiveQueue
    def __init__(self, ready_micro_batches: _Optional[int] = ..., put_bytes: _Optional[int] = ..., put_retries: _Optional[int] = ..., live: _Optional[_Union[LiveQueue, _Mapping]] = ...) -> None: ...

class LiveQueue(_message.Message):
    __slots__ = ("waiting_groups", "incomplete_groups", "producers", "queue_bytes", "queue_budget_bytes", "journal_bytes", "journal_budget_bytes", "journal_lag_seconds", "producer_wait_seconds")
    WAITING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    waiting_groups: int
    incomplete_groups: int
    producers: int
    queue_bytes: int
    queue_budget_bytes: int
    journal_bytes: int
    journal_budget_bytes: int
    journal_lag_seconds: float
    producer_wait_seconds: float
    def __init__(self, waiting_groups: _Optional[int] = ..., incomplete_groups: _Optional[int] = ..., producers: _Optional[int] = ..., queue_bytes: _Optional[int] = ..., queue_budget_bytes: _Optional[int] = ..., journal_bytes: _Optional[int] = ..., journal_budget_bytes: _Optional[int] = ..., journal_lag_seconds: _Optional[float] = ..., producer_wait_seconds: _Optional[float] = ...) -> None: ...

class StepStatus(_message.Message):
    __slots__ = ("step", "seconds", "micro_steps", "train_step", "boundary_idle_seconds", "stage_seconds", "device_wait_seconds", "staged_input_used", "loss", "reward_mean")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGED_INPUT_USED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    step: int
    seconds: float
    micro_steps: int
    train_step: int
    boundary_idle_seconds: float
    stage_seconds: float
    device_wait_seconds: float
    staged_input_used: bool
    loss: float
    reward_mean: float
    def __init__(self, step: _Optional[int] = ..., seconds: _Optional[float] = ..., micro_steps: _Optional[int] = ..., train_step: _Optional[int] = ..., boundary_idle_seconds: _Optional[float] = ..., stage_seconds: _Optional[float] = ..., device_wait_seconds: _Optional[float] = ..., staged_input_used: bool = ..., loss: _Optional[float] = ..., reward_mean: _Optional[float] = ...) -> None: ...
