"""A model for programs without this library or torch: as ONNX, checked on all test samples."""
