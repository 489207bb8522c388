from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_INT16: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_INT16: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_INT64: DataType

class MicroBatchId(_message.Message):
    __slots__ = ("run_id", "step", "index")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    index: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "bytes", "block_digests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    bytes: int
    block_digests: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., block_digests: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("id", "rows", "tokens_per_row", "row_lengths", "tensors", "total_bytes", "digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: MicroBatchId
    rows: int
    tokens_per_row: int
    row_lengths: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    total_bytes: int
    digest: str
    def __init__(self, id: _Optional[_Union[MicroBatchId, _Mapping]] = ..., rows: _Optional[int] = ..., tokens_per_row: _Optional[int] = ..., row_lengths: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("row_start", "row_count", "token_start", "token_count")
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    row_start: int
    row_count: int
    token_start: int
    token_count: int
    def __init__(self, row_start: _Optional[int] = ..., row_count: _Optional[int] = ..., token_start: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class SharedMemorySlot(_message.Message):
    __slots__ = ("pool", "slot", "generation", "offset")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    pool: str
    slot: int
    generation: int
    offset: int
    def __init__(self, pool: _Optional[str] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class PutMicroBatchHeader(_message.Message):
    __slots__ = ("manifest", "epoch", "shard", "shared_memory", "resume_from", "incarnation")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    epoch: int
    shard: Shard
    shared_memory: SharedMemorySlot
    resume_from: int
    incarnation: str
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., epoch: _Optional[int] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemorySlot, _Mapping]] = ..., resume_from: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class PutMicroBatchChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutMicroBatchEnd(_message.Message):
    __slots__ = ("total_bytes",)
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ...) -> None: ...

class PutMicroBatchRequest(_message.Message):
    __slots__ = ("header", "chunk", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: PutMicroBatchHeader
    chunk: PutMicroBatchChunk
    end: PutMicroBatchEnd
    def __init__(self, header: _Optional[_Union[PutMicroBatchHeader, _Mapping]] = ..., chunk: _Optional[_Union[PutMicroBatchChunk, _Mapping]] = ..., end: _Optional[_Union[PutMicroBatchEnd, _Mapping]] = ...) -> None: ...

class PutMicroBatchResponse(_message.Message):
    __slots__ = ("stored", "received_bytes", "duplicate", "receive_seconds", "check_seconds")
    STORED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    received_bytes: int
    duplicate: bool
    receive_seconds: float
    check_seconds: float
    def __init__(self, stored: bool = ..., received_bytes: _Optional[int] = ..., duplicate: bool = ..., receive_seconds: _Optional[float] = ..., check_seconds: _Optional[float] = ...) -> None: ...
