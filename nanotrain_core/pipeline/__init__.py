"""Pipeline: a schedule is a list of actions; one executor runs it, stages communicate by send/recv."""
