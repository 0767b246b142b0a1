"""The runtime: trains with an output folder on ONNX Runtime. It imports nothing of the compiler."""
