"""Answers files of requests: `octavo batch`.

- `batch_file.py`: what is asked, line by line;
- `answer_file.py`: what was answered, and what is left to do after a crash;
- `runner.py`: sends the requests, a few at a time, until each has an answer.
"""
