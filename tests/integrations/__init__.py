"""Tests against the real scikit-learn, skorch, Lightning, BoTorch, ONNX and laplace-torch: `make test-integrations`."""
