"""`octavo top` and `octavo explain`: what a scheduler does, at a terminal.

From answers to the screen: `polling.py` asks, `rates.py` compares two answers, `rows.py` and `overview.py` lay out
what is shown, `snapshot.py` prints it once, `app.py` shows it all the time. One request: `report.py` asks,
`report_text.py` lays it out. The scheduler says states in words (`status_text`), here and on its live page the same.
"""
