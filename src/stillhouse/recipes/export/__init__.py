"""What a model is handed on as: diffusers, ONNX or torch.export, with a card, and to the hub."""
