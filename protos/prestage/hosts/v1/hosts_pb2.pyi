from prestage.tensor.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MicroBatchRef(_message.Message):
    __slots__ = ("run_id", "step", "index", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    index: int
    digest: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., index: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class FetchShardRequest(_message.Message):
    __slots__ = ("incarnation", "process_id", "batch")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    process_id: int
    batch: MicroBatchRef
    def __init__(self, incarnation: _Optional[str] = ..., process_id: _Optional[int] = ..., batch: _Optional[_Union[MicroBatchRef, _Mapping]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("number", "welcome", "start", "hold", "compile", "prepare", "fwd_bwd", "update", "abort_step", "save", "restore", "compute_logprobs", "evaluate", "parameter_digest", "pin_weights", "release_weights", "close")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FWD_BWD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PIN_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    welcome: Welcome
    start: Start
    hold: Hold
    compile: Compile
    prepare: Prepare
    fwd_bwd: FwdBwd
    update: Update
    abort_step: AbortStep
    save: Save
    restore: Restore
    compute_logprobs: ComputeLogprobs
    evaluate: Evaluate
    parameter_digest: ParameterDigest
    pin_weights: PinWeights
    release_weights: ReleaseWeights
    close: Close
    def __init__(self, number: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., compile: _Optional[_Union[Compile, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., fwd_bwd: _Optional[_Union[FwdBwd, _Mapping]] = ..., update: _Optional[_Union[Update, _Mapping]] = ..., abort_step: _Optional[_Union[AbortStep, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., compute_logprobs: _Optional[_Union[ComputeLogprobs, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., parameter_digest: _Optional[_Union[ParameterDigest, _Mapping]] = ..., pin_weights: _Optional[_Union[PinWeights, _Mapping]] = ..., release_weights: _Optional[_Union[ReleaseWeights, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hold(_message.Message):
    __slots__ = ("batch", "shard")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    batch: MicroBatchRef
    shard: _tensor_pb2.Shard
    def __init__(self, batch: _Optional[_Union[MicroBatchRef, _Mapping]] = ..., shard: _Optional[_Union[_tensor_pb2.Shard, _Mapping]] = ...) -> None: ...

class Compile(_message.Message):
    __slots__ = ("rows", "tokens_per_row", "fields")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    tokens_per_row: int
    fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rows: _Optional[int] = ..., tokens_per_row: _Optional[int] = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("batch", "denominator")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DENOMINATOR_FIELD_NUMBER: _ClassVar[int]
    batch: MicroBatchRef
    denominator: float
    def __init__(self, batch: _Optional[_Union[MicroBatchRef, _Mapping]] = ..., denominator: _Optional[float] = ...) -> None: ...

class FwdBwd(_message.Message):
    __slots__ = ("prepared",)
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    prepared: int
    def __init__(self, prepared: _Optional[int] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortStep(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Save(_message.Message):
    __slots__ = ("run_id", "step", "train_step", "epoch", "last_seq", "data_cursor")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    DATA_CURSOR_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    train_step: int
    epoch: int
    last_seq: int
    data_cursor: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., train_step: _Optional[int] = ..., epoch: _Optional[int] = ..., last_seq: _Optional[int] = ..., data_cursor: _Optional[str] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ComputeLogprobs(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: MicroBatchRef
    def __init__(self, batch: _Optional[_Union[MicroBatchRef, _Mapping]] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: MicroBatchRef
    def __init__(self, batch: _Optional[_Union[MicroBatchRef, _Mapping]] = ...) -> None: ...

class ParameterDigest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinWeights(_message.Message):
    __slots__ = ("memory_budget_bytes",)
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_budget_bytes: int
    def __init__(self, memory_budget_bytes: _Optional[int] = ...) -> None: ...

class ReleaseWeights(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Report(_message.Message):
    __slots__ = ("hello", "ready", "held", "done", "settled", "beat", "failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    held: Held
    done: Done
    settled: Settled
    beat: Beat
    failed: Failed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("process_id", "num_processes", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    num_processes: int
    settings: _containers.ScalarMap[str, str]
    def __init__(self, process_id: _Optional[int] = ..., num_processes: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("engine",)
    class EngineEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: _containers.ScalarMap[str, str]
    def __init__(self, engine: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("batch", "error", "received_bytes", "seconds")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    batch: MicroBatchRef
    error: str
    received_bytes: int
    seconds: float
    def __init__(self, batch: _Optional[_Union[MicroBatchRef, _Mapping]] = ..., error: _Optional[str] = ..., received_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("number", "chain", "outcome", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    chain: bytes
    outcome: str
    error: str
    def __init__(self, number: _Optional[int] = ..., chain: _Optional[bytes] = ..., outcome: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("number", "digest", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    digest: bytes
    error: str
    def __init__(self, number: _Optional[int] = ..., digest: _Optional[bytes] = ..., error: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("last_number", "shard_bytes")
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    last_number: int
    shard_bytes: int
    def __init__(self, last_number: _Optional[int] = ..., shard_bytes: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
