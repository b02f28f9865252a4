"""kestrel: language models on an NVIDIA GPU, bit-identical to their CPU reference."""
