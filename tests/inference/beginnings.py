"""Beginnings of texts."""

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n",
    "The three laws of motion are",
    "1, 1, 2, 3, 5, 8,",
    "A shoal of fish swims together because",
    "In the beginning",
    "The recipe calls for two cups of",
    "import numpy as np\n\n",
    "Question: How many legs has a spider?\nAnswer:",
    "Paris, Rome, Madrid,",
    "She opened the door and",
    "The mitochondria",
    "To train a neural network, one",
    "Monday, Tuesday, Wednesday,",
    "# Installation\n\nRun",
    "El perro corre por",
    "Photosynthesis is the process by which",
)
