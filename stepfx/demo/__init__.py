"""The demo: a small trained model, sampled without and with a step cache."""
