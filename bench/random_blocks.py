"""Random blocks of quantized types, also of those that the package gguf cannot quantize to."""
import gguf
import numpy as np

# Byte offsets of the f16 scales in a block, and the ratio between them that centres values at zero, for the types that
# the package `gguf` cannot quantize to.
SCALES = {"Q2_K": [(80, 1.0), (82, 1.5)], "Q3_K": [(108, 1.0)], "Q4_K": [(0, 1.0), (2, 7.5)],
          "Q5_K": [(0, 1.0), (2, 15.5)], "Q6_K": [(208, 1.0)], "MXFP4": [], "NVFP4": [], "IQ1_M": []}
SCALES |= {name: [(0, 1.0)] for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")}


def blocks(values, kind, random):
    """The quantized values, or random blocks of the same standard deviation where the package cannot quantize."""
    if kind.name not in SCALES:
        return gguf.quants.quantize(values, kind)
    size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (values.size // size, bytes_), dtype=np.uint8)

    def scale(unit):
        if kind.name == "MXFP4":
            data[:, 0] = round(127 + np.log2(unit))
        elif kind.name == "NVFP4":
            data[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(np.array([unit]))
        elif kind.name == "IQ1_M":
            # The f16 scale is in four high nibbles, the lowest first.
            for place, at in enumerate((49, 51, 53, 55)):
                nibble = int(np.float16(unit).view(np.uint16)) >> 4 * place & 15
                data[:, at] = data[:, at] & 15 | nibble << 4
        for at, ratio in SCALES[kind.name]:
            data[:, at:at + 2] = np.frombuffer(np.float16(unit * ratio).tobytes(), dtype=np.uint8)

    scale(1.0)
    scale(values.std() / gguf.quants.dequantize(data, kind).std())
    return data.reshape(*values.shape[:-1], -1)
