from lab.race.race import main

main()
