"""Makes and checks files with the Python package gguf: `interop.py make|check|split|foreign PATH`.

The contents are the same as in tests/python.rs.
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter

SCALARS = [
    ("value.u8", GGUFValueType.UINT8, 200),
    ("value.i8", GGUFValueType.INT8, -100),
    ("value.u16", GGUFValueType.UINT16, 60000),
    ("value.i16", GGUFValueType.INT16, -30000),
    ("value.u32", GGUFValueType.UINT32, 4000000000),
    ("value.i32", GGUFValueType.INT32, -2000000000),
    ("value.u64", GGUFValueType.UINT64, 2**64 - 1),
    ("value.i64", GGUFValueType.INT64, -(2**63)),
    ("value.f32", GGUFValueType.FLOAT32, 1.5),
    ("value.f64", GGUFValueType.FLOAT64, 0.1),
    ("value.bool", GGUFValueType.BOOL, True),
    ("value.string", GGUFValueType.STRING, "grün 🚀"),
]
ARRAYS = [
    ("array.i32", GGUFValueType.INT32, [1, -2, 3]),
    ("array.f32", GGUFValueType.FLOAT32, [0.5, -0.25]),
    ("array.bool", GGUFValueType.BOOL, [True, False]),
    ("tokenizer.ggml.tokens", GGUFValueType.STRING, [f"tök{i}" for i in range(1000)]),
]
# Name, type, dimensions outermost first.
TENSORS = [
    ("plain.f32", GGMLQuantizationType.F32, (3, 5)),
    ("plain.f16", GGMLQuantizationType.F16, (2, 3, 4)),
    ("plain.i8", GGMLQuantizationType.I8, (7,)),
    ("plain.i64", GGMLQuantizationType.I64, (2, 1, 2, 3)),
    ("block.q4_0", GGMLQuantizationType.Q4_0, (4, 64)),
    ("block.q8_0", GGMLQuantizationType.Q8_0, (3, 32)),
    ("block.q4_k", GGMLQuantizationType.Q4_K, (2, 512)),
    ("block.mxfp4", GGMLQuantizationType.MXFP4, (2, 32)),
]
PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I64: np.int64,
}
BLOCKS = {
    GGMLQuantizationType.F32: (1, 4),
    GGMLQuantizationType.F16: (1, 2),
    GGMLQuantizationType.I8: (1, 1),
    GGMLQuantizationType.I64: (1, 8),
    GGMLQuantizationType.Q4_0: (32, 18),
    GGMLQuantizationType.Q8_0: (32, 34),
    GGMLQuantizationType.Q4_K: (256, 144),
    GGMLQuantizationType.MXFP4: (32, 17),
}


def content(name, kind, dims):
    """The bytes of a tensor: a count from the length of its name, below 120 so that floats are numbers."""
    length, size = BLOCKS[kind]
    count = int(np.prod(dims)) // length * size
    return np.array([(len(name) + index) % 120 for index in range(count)], dtype=np.uint8)


def writer(path, **options):
    out = GGUFWriter(path, "llama", **options)
    for key, kind, value in SCALARS:
        out.add_key_value(key, value, kind)
    for key, kind, value in ARRAYS:
        out.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kind)
    for name, kind, dims in TENSORS:
        data = content(name, kind, dims)
        if kind in PLAIN:
            out.add_tensor(name, data.view(PLAIN[kind]).reshape(dims))
        else:
            length, size = BLOCKS[kind]
            out.add_tensor(name, data.reshape(*dims[:-1], dims[-1] // length * size), raw_dtype=kind)
    return out


def write(out):
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def check(path):
    reader = GGUFReader(path)
    for key, kind, value in SCALARS:
        field = reader.fields[key]
        assert field.types == [kind], (key, field.types)
        assert field.contents() == value, (key, field.contents(), value)
    for key, kind, value in ARRAYS:
        field = reader.fields[key]
        assert field.types == [GGUFValueType.ARRAY, kind], (key, field.types)
        assert field.contents() == value, (key, field.contents(), value)
    assert reader.alignment == 64, reader.alignment
    assert [tensor.name for tensor in reader.tensors] == [name for name, _, _ in TENSORS]
    for tensor, (name, kind, dims) in zip(reader.tensors, TENSORS):
        assert tensor.tensor_type == kind, (name, tensor.tensor_type)
        assert tuple(tensor.shape)[::-1] == dims, (name, tensor.shape)
        assert tensor.data.tobytes() == content(name, kind, dims).tobytes(), name


def main():
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "check":
        check(path)
    elif command == "make":
        write(writer(path))
    elif command == "split":
        write(writer(path, split_max_tensors=3))
    elif command == "foreign":
        other = GGUFEndian.BIG if sys.byteorder == "little" else GGUFEndian.LITTLE
        write(writer(path, endianess=other))
    else:
        sys.exit(f"unknown command {command}")


main()
