"""Finds state that training changes and no `state_dict` names."""
