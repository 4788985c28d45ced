"""A model for programs without this library or torch: as ONNX and .pt2, checked on all test samples."""
