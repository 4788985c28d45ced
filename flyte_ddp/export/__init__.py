"""Exports models as ONNX for programs without this library or torch, and checks the ONNX on all test samples."""
