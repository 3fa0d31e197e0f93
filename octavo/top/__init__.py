"""`octavo top` and `octavo explain`: what a scheduler does, at a terminal.

From answers to the screen: `polling.py` asks, `rates.py` compares two answers, `rows.py` has what a line says,
`columns.py` and `overview.py` lay it out, `snapshot.py` prints it once, `app.py` shows it all the time. One request:
`report.py` asks, `report_text.py` lays it out.
"""
